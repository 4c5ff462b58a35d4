"""The command line: each command declares its options once and calls the packages below it."""
