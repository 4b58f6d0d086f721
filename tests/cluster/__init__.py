"""Tests of several servers behind one address."""
