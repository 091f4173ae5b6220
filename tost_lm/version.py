"""The version of tost_lm, recorded in what it writes."""

VERSION = "0.1.0"
