"""Promises that Warren broke once, each shown by an experiment of one of two audits.

The programs of the audits are tests here, one module for each boundary. A docstring begins with the
program's number (01 to 16 of the first audit, q01 to q33 of the second) and says how the promise
was broken then; what the program's verdict asked for is what the test asserts. Where the right
behaviour is an error, the test wants that very error.
"""
