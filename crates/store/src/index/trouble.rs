//! What can go wrong with the database, and what of it means that the file is broken.

use std::io::ErrorKind;
use std::path::Path;

use redb::{DatabaseError, StorageError, TableError, TransactionError};

use crate::StoreError;

/// What can go wrong within a transaction.
pub(super) enum Trouble {
    /// The file is no index, or a broken one.
    Broken(String),
    Database(redb::Error),
    /// The store's own error: nothing is wrong with the database.
    Store(StoreError),
}

impl Trouble {
    pub(super) fn at(self, action: &'static str, path: &Path) -> StoreError {
        let path = path.to_owned();
        match self {
            Trouble::Broken(why) => StoreError::Index { action, path, why },
            Trouble::Database(error) => StoreError::Index { action, path, why: error.to_string() },
            Trouble::Store(error) => error,
        }
    }
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Trouble {
        Trouble::Store(error)
    }
}

impl From<DatabaseError> for Trouble {
    fn from(error: DatabaseError) -> Trouble {
        match error {
            DatabaseError::Storage(error) => error.into(),
            DatabaseError::UpgradeRequired(_) | DatabaseError::RepairAborted => {
                Trouble::Broken(error.to_string())
            }
            error => Trouble::Database(error.into()),
        }
    }
}

impl From<StorageError> for Trouble {
    fn from(error: StorageError) -> Trouble {
        match error {
            StorageError::Corrupted(why) => Trouble::Broken(why),
            StorageError::Io(error)
                if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) =>
            {
                Trouble::Broken(error.to_string())
            }
            error => Trouble::Database(error.into()),
        }
    }
}

macro_rules! database_trouble {
    ($($error:ty),*) => {$(
        impl From<$error> for Trouble {
            fn from(error: $error) -> Trouble {
                Trouble::Database(error.into())
            }
        }
    )*};
}

database_trouble!(TableError, TransactionError, redb::CommitError);
