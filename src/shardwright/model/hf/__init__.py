"""Hugging Face folders and peft adapters, read and written, and transformers' own classes."""
