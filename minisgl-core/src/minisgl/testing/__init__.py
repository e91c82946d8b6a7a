"""What tests of backends and models build on: contract suites and stand-ins."""
