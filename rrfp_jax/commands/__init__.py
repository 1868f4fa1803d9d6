"""What the command line runs: each module puts the rooms together for one command."""
