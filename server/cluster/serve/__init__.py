"""The part of the cluster that needs Ray: its processes, how they call each other, and `kvmux ray up`."""
