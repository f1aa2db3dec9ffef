from offbook.cli import main

main()
