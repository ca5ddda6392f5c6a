"""The Hugging Face hub: downloads with errors that say what to do, and checks of what lies in its cache. No torch."""
