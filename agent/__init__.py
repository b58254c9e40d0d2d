"""schedtrace: watches the goroutines of running Go programs from outside and says where their time goes.

Importing this package needs neither BCC nor any right.
"""
