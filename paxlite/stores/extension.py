"""The extension for object stores: gs:// and s3:// paths."""

from paxlite.core.extension import Extension

_STORES = 'paxlite.stores.scheme:STORES'
EXTENSION = Extension('stores', schemes={'gs': _STORES, 's3': _STORES})
