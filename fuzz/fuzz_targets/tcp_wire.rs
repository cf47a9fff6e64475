//! What readers and sources of the `tcp` transport send: whatever decodes encodes to the same bytes, a read that is granted
//! lies within the payload, an answer is of what was asked.
#![no_main]

use flashboot_backend_tcp::wire::{
    ANSWER, Answer, Attach, Attached, MAX_FRAME, MAX_READ, Read, Request, Seen,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(attach) = Attach::decode(data) {
        assert_eq!(attach.encode(), data);
    }
    if let Ok(seen) = Seen::decode(data) {
        assert_eq!(seen.encode(), data);
    }
    if let Ok(attached) = Attached::decode(data) {
        assert!(data.len() <= MAX_FRAME);
        let text = attached.refused.as_ref().map_or("", |(_, text)| text);
        assert!(!text.chars().any(char::is_control));
        assert!(Attached::decode(&attached.encode()).is_ok());
    }
    if let Ok(request) = Request::decode(data) {
        assert_eq!(request.encode(), data);
        if let Request::Read(read) = request {
            granted(&read, data);
        }
    }
});

/// Against payloads around the read's own end, and an answer made of the same bytes.
fn granted(read: &Read, data: &[u8]) {
    let end = read.start.saturating_add(read.len.into());
    for payload in [0, end.saturating_sub(1), end, end.saturating_add(1), u64::MAX] {
        if let Some(range) = read.range(payload) {
            assert!(range.end <= payload && range.len() <= MAX_READ);
        }
    }
    if let Some(head) = data.last_chunk::<ANSWER>()
        && let Ok(answer) = Answer::decode(head, read)
    {
        assert_eq!(&answer.encode(), head);
        assert!(answer.refused.is_some() || answer.len == read.len);
    }
}
