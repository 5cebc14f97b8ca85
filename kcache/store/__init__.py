"""Stores: named bytes, somewhere. They know nothing of manifests, keys or indexes.

The contract is in `kcache.store.base`; `kcache.store.open` makes a store from what a user wrote.
"""
