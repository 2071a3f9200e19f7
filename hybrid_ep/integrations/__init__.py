"""Adapters that let training frameworks use this library; see docs/integrations.md.

Nothing here is imported by the library itself. An adapter imports its framework, so importing one
without the framework raises an ImportError that says what to install.
"""
