"""Tokens: tokenizers, tokenisation and the cache of token ids."""
