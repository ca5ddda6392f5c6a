"""Drafts: which rows get how many, from texts, a draft model or an MTP head; policy apart from mechanism. No torch."""
