//! What a process shows by HTTP.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part; tests panic")]

use super::fleet::LIMIT;
use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
};

/// A port that nobody has at this moment.
pub(crate) fn free() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Code and body.
pub(crate) fn get(at: &str, path: &str) -> (u16, String) {
    let Ok(mut stream) = TcpStream::connect(at) else { return (0, String::new()) };
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let mut answer = String::new();
    if stream.write_all(request.as_bytes()).and_then(|()| stream.read_to_string(&mut answer)).is_err() {
        return (0, answer);
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    (code, body.to_owned())
}
