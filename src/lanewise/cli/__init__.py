"""The command line: one command a file, and nothing imported before a command needs it."""
