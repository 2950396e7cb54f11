"""Webhooks: telling a client's server that a background request or a batch has ended.

`targets` says where they may go; `sending` signs and sends one; `courier` takes those that are due from the store and
sends them, until they arrive or their time is over.
"""
