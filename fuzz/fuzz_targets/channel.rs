//! What a peer sends first: a hello that decodes encodes to the same bytes, frames keep to their cap, an endpoint that
//! parses is written so that it parses the same.
//!
//! The first byte says which.
#![no_main]

use flashboot_channel::{
    Endpoint, frame,
    hello::{FIXED, Hello, LEN, Role, check_fixed},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&form, rest)) = data.split_first() else { return };
    match form {
        b'h' => hellos(rest),
        b'e' => endpoints(&String::from_utf8_lossy(rest)),
        _ => frames(rest, usize::from(form)),
    }
});

fn hellos(bytes: &[u8]) {
    if let Some(fixed) = bytes.first_chunk::<FIXED>() {
        let _ = check_fixed(*fixed);
    }
    let Some(bytes) = bytes.first_chunk::<LEN>() else { return };
    for role in [Role::Dialler, Role::Listener] {
        if let Ok(hello) = Hello::decode(bytes, role) {
            assert_eq!(&hello.encode(), bytes);
        }
    }
}

fn frames(mut wire: &[u8], cap: usize) {
    while let Ok(Some(body)) = frame::read(&mut wire, cap) {
        assert!(body.len() <= cap);
        assert!(frame::framed(&body, cap).is_ok());
    }
}

fn endpoints(text: &str) {
    if let Ok(endpoint) = text.parse::<Endpoint>() {
        assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
    }
}
