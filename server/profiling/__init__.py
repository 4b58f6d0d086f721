"""Where the time of a step goes, beside what this machine allows: `kvmux profile`."""
