"""Sources of training data: files of a folder, a dataset on the Hub or an object store."""
