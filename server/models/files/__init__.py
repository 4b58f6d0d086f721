"""Where the files of a model are: in a directory, in the user's cache, or on the Hugging Face hub."""
