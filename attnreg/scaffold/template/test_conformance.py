from attnreg.conformance import conformance_suite
from MODULE import backend

TestConformance = conformance_suite(backend)
