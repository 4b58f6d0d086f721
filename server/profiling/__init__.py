"""`kvmux profile`: shows where the time of a model step goes, and how near it comes to the limits of the machine."""
