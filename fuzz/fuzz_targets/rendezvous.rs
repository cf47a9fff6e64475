//! What a client of the replication service sends: whatever decodes is answered, twice the same, and encodes to what
//! decodes the same.
//!
//! Every line is a message to one service with one seed; its first byte is how many seconds later it comes.
#![no_main]

use flashboot_rendezvous::protocol::{
    Answer, Greeting, Hello, Request, Rules, Service, agree, decode, encode,
};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

fuzz_target!(|data: &[u8]| {
    let mut service = Service::new(Rules { members: 8, contents: 4, ..Rules::default() });
    let mut now = Duration::ZERO;
    for line in data.split(|b| *b == b'\n') {
        let Some((&wait, message)) = line.split_first() else { continue };
        now += Duration::from_secs(wait.into());
        if let Ok(hello) = decode::<Hello>(message) {
            let _ = agree(&hello);
        }
        if let Ok(greeting) = decode::<Greeting>(message) {
            assert_eq!(decode(&encode(&greeting)), Ok(greeting));
        }
        if let Ok(answer) = decode::<Answer>(message) {
            assert_eq!(decode(&encode(&answer)), Ok(answer));
        }
        let Ok(request) = decode::<Request>(message) else { continue };
        assert_eq!(decode(&encode(&request)), Ok(request.clone()));
        service.handle(now, request.clone());
        let before = service.status();
        service.handle(now, request);
        assert_eq!(service.status().members.len(), before.members.len());
    }
});
