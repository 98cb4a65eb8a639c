"""The HTML report: one page without any request of its own, from a plan or an answer of ``recommend``."""
