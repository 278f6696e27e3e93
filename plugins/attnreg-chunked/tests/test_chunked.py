from attnreg_chunked import backend

from attnreg.conformance import conformance_suite

TestChunked = conformance_suite(backend("chunked-4", block=4))
