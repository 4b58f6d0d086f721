"""The command line `kvmux`. Imports nothing heavy before a command needs it."""
