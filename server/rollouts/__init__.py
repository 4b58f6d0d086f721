"""Roll-outs: another instance serves a growing share of an instance's requests, and is rolled back if it is worse."""
