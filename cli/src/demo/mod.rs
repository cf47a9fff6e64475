//! What the demonstration needs beside the verbs: a real model, and a directory to work in.

pub(crate) mod fetch;
pub(crate) mod scratch;
