//! What several tests have in common: a reader that speaks the protocol by hand.

use flashboot_backend_tcp::wire::{Attach, Attached, Lane, MAX_FRAME};
use flashboot_channel::{Channel, Dial, Liveness, Purpose, Security, dial};
use flashboot_core::Locator;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);

/// A connection to what `locator` names, attached for `lane`.
pub(crate) async fn attached(locator: &Locator, lane: Lane) -> Channel {
    let how =
        Dial { purpose: Purpose::new("tcp").unwrap(), timeout: 5 * SECOND, liveness: Liveness::default() };
    let endpoint = locator.endpoint.parse().unwrap();
    let mut channel = dial(&endpoint, &Security::default(), how).await.unwrap();
    let attach = Attach { lane, generation: locator.generation.word() };
    channel.send(&attach.encode(), MAX_FRAME, SECOND).await.unwrap();
    let frame = channel.receive(MAX_FRAME, 5 * SECOND).await.unwrap().unwrap();
    assert_eq!(Attached::decode(&frame).unwrap().refused, None);
    channel
}

/// Whether the source ends the connection, without a word, over `frame`.
pub(crate) async fn ends_over(locator: &Locator, lane: Lane, frame: &[u8]) -> bool {
    let mut channel = attached(locator, lane).await;
    channel.send(frame, 1 << 20, SECOND).await.unwrap();
    matches!(channel.receive(MAX_FRAME, 5 * SECOND).await, Ok(None) | Err(_))
}
