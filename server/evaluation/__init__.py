"""What a cache strategy costs in quality: the same text read under several strategies, compared with exact caching."""
