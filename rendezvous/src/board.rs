//! What a board promises.

use async_trait::async_trait;
use flashboot_core::Result;
use std::time::Duration;

/// Named values, each set once and then the same for ever.
#[async_trait]
pub trait Board: Send + Sync {
    /// Sets `name`. Setting it again to the same value changes nothing.
    ///
    /// # Errors
    /// [`flashboot_core::Kind::Mismatch`] when it has another value, [`flashboot_core::Kind::SourceLost`]
    /// when the board's server is gone.
    async fn put(&self, name: &str, value: String) -> Result<()>;

    /// Waits for `name` to be set.
    ///
    /// # Errors
    /// [`flashboot_core::Kind::Deadline`] after `timeout`.
    async fn wait(&self, name: &str, timeout: Duration) -> Result<String>;

    /// The value of `name`, if it is set by now.
    async fn look(&self, name: &str) -> Result<Option<String>>;
}

/// Waits until every rank in `0..ranks` has come to the barrier `name`.
pub async fn barrier(board: &dyn Board, name: &str, rank: u32, ranks: u32, timeout: Duration) -> Result<()> {
    board.put(&format!("{name}/{rank}"), String::new()).await?;
    for other in 0..ranks {
        board.wait(&format!("{name}/{other}"), timeout).await?;
    }
    Ok(())
}
