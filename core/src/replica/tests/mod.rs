//! What the machine holds to: against a hostile world, and in histories written by hand.

mod hand;
mod world;
