"""What all commands share: options, programs, jobs, folders, locks, logs and exit codes."""
