"""Drafters: they predict a sequence's next tokens, which one step then verifies together. See docs/drafts.md."""
