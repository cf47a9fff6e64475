//! What the demonstration needs beside the verbs: a real model.

pub(crate) mod fetch;
