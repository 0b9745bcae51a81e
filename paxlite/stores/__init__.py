"""Object stores (gs://, s3://): addresses, requests, local copies and partial reads."""
