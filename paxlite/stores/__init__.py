"""Object stores (gs://, s3://): addresses, requests, local copies, and reads of parts."""
