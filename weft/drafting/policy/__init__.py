"""Drafters: guesses at a sequence's next tokens, which one step then verifies together. See docs/drafts.md."""
