"""What tries to get code loaded that nobody published: changed caches and builds, servers that lie, hard conditions."""
