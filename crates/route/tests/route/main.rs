//! Tests of the choice, of the rules one by one, and of the index.

mod choice;
mod common;
mod index;
mod rules;
