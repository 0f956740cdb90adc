"""The gRPC front end: one servicer per service of `foreword.v1`."""
