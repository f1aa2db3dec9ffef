"""Tasks from two trees and a message: two releases of a package, or a commit and its parent."""
