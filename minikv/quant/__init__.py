"""What only quantised K and V use: number formats, a store of codes and scales, and attention.

The core imports nothing of this until `EngineConfig` has a `kv_dtype` or a `kv_memory`. Read
`formats` first, then `store`, `attention` and `oracle`.
"""
