"""Settings, and the provisioning files of the programs that watch the server."""
