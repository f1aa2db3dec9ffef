"""From a name, folder, archive or URL to a repository whose tests can be relied on."""
