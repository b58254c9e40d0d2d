"""The BPF sources, as data: ``importlib.resources.files("schedtrace.bpf")`` is the folder they are in."""
