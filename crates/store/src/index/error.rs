//! Errors inside an index transaction, and which of them mean that the database file is broken.

use std::io::ErrorKind;
use std::path::Path;

use redb::{DatabaseError, StorageError, TableError, TransactionError};

use crate::StoreError;

/// An error inside an index transaction.
pub(crate) enum IndexError {
    /// The file is not an index, or a broken one. The reason.
    Broken(String),
    /// The database refused something. The file may be whole.
    Database(redb::Error),
    /// The store's own code failed inside the transaction. The database is whole.
    Store(StoreError),
}

impl IndexError {
    /// The store's error for `action` on the database file `path`.
    pub(super) fn at(self, action: &'static str, path: &Path) -> StoreError {
        let path = path.to_owned();
        match self {
            IndexError::Broken(why) => {
                let remedy = "it is made anew from the chunks if it is removed while no program uses it";
                StoreError::Index { action, path, why: format!("{why}; {remedy}") }
            }
            IndexError::Database(redb::Error::Io(source)) => StoreError::Io { action, path, source },
            IndexError::Database(error) => StoreError::Index { action, path, why: error.to_string() },
            IndexError::Store(error) => error,
        }
    }
}

impl From<StoreError> for IndexError {
    fn from(error: StoreError) -> IndexError {
        IndexError::Store(error)
    }
}

impl From<DatabaseError> for IndexError {
    fn from(error: DatabaseError) -> IndexError {
        match error {
            DatabaseError::Storage(error) => error.into(),
            DatabaseError::UpgradeRequired(_) | DatabaseError::RepairAborted => {
                IndexError::Broken(error.to_string())
            }
            error => IndexError::Database(error.into()),
        }
    }
}

impl From<StorageError> for IndexError {
    fn from(error: StorageError) -> IndexError {
        match error {
            StorageError::Corrupted(why) => IndexError::Broken(why),
            StorageError::Io(error)
                if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) =>
            {
                IndexError::Broken(error.to_string())
            }
            error => IndexError::Database(error.into()),
        }
    }
}

macro_rules! database_error {
    ($($error:ty),*) => {$(
        impl From<$error> for IndexError {
            fn from(error: $error) -> IndexError {
                IndexError::Database(error.into())
            }
        }
    )*};
}

database_error!(TableError, TransactionError, redb::CommitError);

#[cfg(test)]
mod tests {
    use super::*;

    /// A healthy index that the system refuses is not to be removed.
    #[test]
    fn only_a_broken_index_is_said_to_be_made_anew() {
        let said = |error: StorageError| {
            IndexError::from(error).at("open", Path::new("/store/index.redb")).to_string()
        };
        let broken = said(StorageError::Corrupted("a page".to_owned()));
        assert!(broken.contains("index.redb: a page; it is made anew"), "{broken}");
        for (kind, remedy) in [
            (ErrorKind::PermissionDenied, "needs the right to read and write"),
            (ErrorKind::ReadOnlyFilesystem, "where this program can write"),
            (ErrorKind::StorageFull, "make room there"),
        ] {
            let refused = said(StorageError::Io(kind.into()));
            assert!(refused.contains(remedy) && !refused.contains("removed"), "{refused}");
        }
    }
}
