"""What object stores add: the paths of gs:// and s3://."""

from paxlite.core.extension import Extension

_STORES = 'paxlite.stores.scheme:STORES'
EXTENSION = Extension('stores', schemes={'gs': _STORES, 's3': _STORES})
