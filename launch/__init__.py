"""The `capo` command. Every subcommand imports what it needs after its arguments are parsed."""
