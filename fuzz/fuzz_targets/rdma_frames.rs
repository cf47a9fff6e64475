//! What a reader or a source of `rdma` sends parses or is refused; nothing panics, and an answer's regions can be walked.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| flashboot_backend_rdma::fuzz_frames(data));
