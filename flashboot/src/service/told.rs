//! A source of whose end others tell: a word in its memory that stands still is then no word to wait for.
//!
//! For transports that notice nothing themselves. It only ends looks: pulls that are under way stay the driver's to cancel,
//! and own their memory until they are quiet.

use async_trait::async_trait;
use flashboot_core::{Error, Generation, InFlight, Kind, Mover, Observed, Pull, Result, ShardId};
use std::time::Duration;
use tokio::sync::watch;

/// A mover, and the news of its source: true once that has ended.
#[derive(Debug)]
pub(super) struct Told(pub(super) Box<dyn Mover>, pub(super) watch::Receiver<bool>);

#[async_trait]
impl Mover for Told {
    fn generation(&self) -> Generation {
        self.0.generation()
    }

    async fn observe(&self, shard: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
        let mut news = self.1.clone();
        let ended = async move {
            if news.wait_for(|ended| *ended).await.is_err() {
                // Nobody is left to tell.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            seen = self.0.observe(shard, at_least, wait) => return seen,
            () = ended => {}
        }
        // Its last word counts.
        let seen = self.0.observe(shard, at_least, Duration::ZERO).await?;
        if seen.progress >= at_least {
            return Ok(seen);
        }
        let detail = format!("the source has ended with {} of {at_least} bytes published", seen.progress);
        Err(Error::new(Kind::SourceLost, "observe", detail))
    }

    fn start(&self, pull: Pull) -> Result<Box<dyn InFlight>> {
        self.0.start(pull)
    }

    fn remarks(&self) -> Vec<String> {
        self.0.remarks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Still(u64);

    #[async_trait]
    impl Mover for Still {
        fn generation(&self) -> Generation {
            Generation::from_random(7)
        }

        async fn observe(&self, _: ShardId, at_least: u64, wait: Duration) -> Result<Observed> {
            if self.0 < at_least {
                tokio::time::sleep(wait).await;
            }
            Ok(Observed { generation: Some(self.generation()), progress: self.0 })
        }

        fn start(&self, _: Pull) -> Result<Box<dyn InFlight>> {
            Err(Error::new(Kind::Invalid, "start", "not asked"))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_news_ends_a_look_but_not_what_was_published() {
        let (tell, news) = watch::channel(false);
        let told = Told(Box::new(Still(5)), news);
        let (shard, long) = (ShardId(0), Duration::from_secs(30));
        let began = tokio::time::Instant::now();
        assert_eq!(told.observe(shard, 9, long).await.unwrap().progress, 5);
        assert_eq!(began.elapsed(), long, "without news it waits");
        let news = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            tell.send_replace(true);
        };
        let (seen, ()) = tokio::join!(told.observe(shard, 9, long), news);
        assert_eq!(seen.unwrap_err().kind(), Kind::SourceLost);
        assert_eq!(began.elapsed(), long + Duration::from_secs(1));
        assert_eq!(told.observe(shard, 5, long).await.unwrap().progress, 5, "its last word counts");
        drop(tell);
        let (tell, news) = watch::channel(false);
        drop(tell);
        let told = Told(Box::new(Still(5)), news);
        assert_eq!(told.observe(shard, 9, long).await.unwrap().progress, 5, "no news is no end");
    }
}
